"""The top floor: the command line, the development stack, the scaffold, migrations, and what tests need. Nothing below imports it.

Samefold's: an update replaces it.
"""
