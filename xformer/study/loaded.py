"""The revision of the code that the fork server has loaded.

The server imports this module when it starts. Its jobs are forks, which keep the code of that
moment. So they must record its revision, although the checkout may have changed since.
"""

from xformer import provenance

provenance.diff(provenance.revision())  # both are kept in the memory of the process
