import os

from hypothesis import settings

# No deadline: the machine may be busy. In continuous integration the examples are the same in every run, elsewhere new.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
