"""Programs that the tests run on a fake CUDA device; see benchmarks/fake_cuda.py."""
