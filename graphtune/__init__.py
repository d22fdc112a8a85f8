"""graphtune: measure CUDA graph capture on your own GPU and compute the configuration to serve with."""

__version__ = "0.1.0"
