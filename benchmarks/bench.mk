bench: setup ## how fast it is, beside its peers, on a stack of its own (about two hours, on a quiet machine)
	@$(BIN)/samefold bench $(ARGS)
