"""The error of a model directory that cannot be read."""


class ModelFileError(ValueError):
    """Raised for a model directory that cannot be read; names the file or tensor that is missing,
    extra or wrong."""
