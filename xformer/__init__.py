"""Pre-train BERT-family encoders, modify their weights, fine-tune them, and look inside them."""

from xformer.start import allow_more_files, share_cores

share_cores()  # has an effect if torch is imported later
allow_more_files()
