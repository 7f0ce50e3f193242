from xformer.surgery.operations import apply as apply
