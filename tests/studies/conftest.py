"""Settings of tiny models, as the chain's tests have them."""

from workplaces import planted_at, tiny_at

__all__ = ["planted_at", "tiny_at"]
