from hypothesis import settings

# Machines that run other work at the same time make single examples slow; the suite's time limit is enough.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
