"""What one event leads to: one file per policy, found by being here, and `public.py`, which says what other teams may read.

Yours; `engine/`, which keeps the outbox, sends, posts and publishes, is Samefold's.
"""
