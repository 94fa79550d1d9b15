__all__ = ()  # a star would take `grpo_nb.all` for the function
__version__ = "0.1.0"
