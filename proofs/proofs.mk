mutants: setup ## switch guarantees off one at a time, and see a test catch each (minutes)
	@$(BIN)/python -m proofs.mutations $(ARGS)

chaos: setup ## real processes killed, frozen and cut off at random, judged all the while (MINUTES=10 SEED=...)
	@$(BIN)/python -m proofs.chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)
