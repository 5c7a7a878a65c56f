"""HTTP: commands in, views out. Names no event, no command and no view. Samefold's: an update replaces it.

A command's way: `commands` (read, check) → `commands/append.py` → `waits` → `commands` (answer); `outcomes` gives the answer later.
A row's way: `views` → `view_questions` (parse) → `view_reader`, or `feeds`: `live_rows` and `live_lists`.
The state of the stores: `stores` checks Kafka and PostgreSQL, `health` reports it, `services` holds what all requests share.
Around them: `server`, `request_metrics` and `door`; below: `requests`, `problems`, `openapi`.
"""
