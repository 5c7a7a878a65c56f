"""The console: `/console`, pages for those who run the service (docs/console.md). Samefold's: an update replaces it.

`site` renders and guards; each other module is one page. Nothing here writes: what changes something is a command of `samefold`,
which `actions` runs in a process of its own and records.
"""
