"""The version of weft: that of the tag, which the build writes into `_version.py`."""

__all__ = ["__version__"]

try:
    from weft._version import __version__
except ImportError:  # these sources were never built
    __version__ = "0+unbuilt"
