prove: setup ## what only chance finds: hours (MINUTES=10 SEED=7 PART=chaos|models|histories|mutants|demos|bench-self|new-services|weather)
	@$(BIN)/python -m proofs $(PART) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)
