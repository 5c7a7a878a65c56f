"""The embedded stack for development: Kafka and PostgreSQL on loopback, under one data folder, without Docker."""
