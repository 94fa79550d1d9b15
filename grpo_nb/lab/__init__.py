from . import logs  # noqa: F401  (Run.open reads the logs of TRL and verl)
