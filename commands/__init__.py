"""The write side: from a record in `commands` to a commit in `events`. Names no event and no command of any domain.

In the handler: `handler` (the loop) → `fetching` → `intake` → `partition` → `snapshots` → `writer` → `overlay`, `decision`.
Before it serves: `group` assigns partitions, `takeover` and `release` lead a writer there.
Clients: `client` and the API append by `append` and `sealing`, and read `outcomes`.

Samefold's: an update replaces it.
"""
