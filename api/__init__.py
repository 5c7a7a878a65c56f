"""HTTP: commands in, views out. Names no event, no command and no view. Samefold's: an update replaces it.

A command's way: `server` (the connection) → `request_metrics` → `commands` (check) → `append` → `outcome_waits` → `outcomes`.
A read's way: `views` → `view_questions` (parse) → `view_reader`, or `live_rows`. `services` holds what all requests share, `stores`
checks Kafka and PostgreSQL, and `health` reports these checks.
"""
