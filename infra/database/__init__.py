"""The connection to PostgreSQL, the core tables and their migrations.

Samefold's: an update replaces it. The tables of your views are in `projections/migrations`.
"""
