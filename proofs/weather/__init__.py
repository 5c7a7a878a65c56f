"""A month of weather in minutes: the service's own processes on a real Kafka and PostgreSQL, under one wall clock that jumps."""
