"""The business and nothing else: one pure file per bounded context, on the standard library and pydantic alone."""
