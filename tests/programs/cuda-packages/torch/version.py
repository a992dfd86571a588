__version__ = "2.13.0+cu130"
cuda: str | None = "13.0"
hip: str | None = None
