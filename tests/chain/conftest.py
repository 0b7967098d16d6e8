"""Settings of tiny models, shared by the tests of interventions."""

from workplaces import config, planted_at, tiny_at, triggered

__all__ = ["config", "planted_at", "tiny_at", "triggered"]
