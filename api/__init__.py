"""HTTP: commands in, views out. Names no event, no command and no view. Samefold's: an update replaces it.

The way of a command: `server` (the connection) → `request_metrics` → `commands` (read, check) → `append` → `outcome_waits` →
`outcomes` (the answer). The way of a read: `views` → `view_questions` (what is asked) → `view_reader`; live: `live_rows`. What all
requests share is in `services`; what is known of Kafka and PostgreSQL in `stores`, and `health` reports it.
"""
