.PHONY: bench-jvm

bench: setup ## how fast it is, beside its peers, on a stack of its own (about two hours, on a quiet machine)
	@$(BIN)/samefold bench $(ARGS)

bench-jvm: setup ## the benchmarks' peers in Java, Flink and Kafka Streams, into .venv (needs Maven; a minute)
	@for peer in flink streams; do \
	  mvn --quiet --batch-mode --file benchmarks/peers/jvm/$$peer.xml -Dout=$(abspath $(VENV))/jvm-peers/$$peer package || exit 1; \
	done
