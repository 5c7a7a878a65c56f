demo: setup ## load a bank's transactions, kill processes on the way, prove that nothing was lost or doubled
	@$(BIN)/samefold demo $(ARGS)
