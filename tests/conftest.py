"""How hard the property tests try: `pytest --hypothesis-profile=thorough` draws many more examples."""

from hypothesis import HealthCheck, settings

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors)

settings.register_profile("default", max_examples=150, deadline=None, suppress_health_check=QUIET)
settings.register_profile("thorough", max_examples=1500, deadline=None, suppress_health_check=QUIET)
settings.load_profile("default")
