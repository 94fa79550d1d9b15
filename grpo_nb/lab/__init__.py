from . import log_importers  # noqa: F401  (Run.open reads the logs of TRL and verl)
