bench: setup ## how fast it is, beside its peers, on a stack of its own (about an hour, on a quiet machine)
	@$(BIN)/samefold bench $(ARGS)
