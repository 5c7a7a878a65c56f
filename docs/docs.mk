# The pages as a site. Only Samefold has it: a new service gets some of the pages, and reads them as files.
DOCS = $(VENV)/docs
# Scripts that the theme would load from elsewhere: Mermaid draws the diagrams, the other one lets a page search without a server.
SCRIPTS = mermaid@11.17.2 iframe-worker@1.0.4
define SCRIPTS_SHA256
6ad2f42c3fc26bbf9e45cbb6d11898972573ea52b33a5f4ff51952899f950ffd  mermaid-11.17.2.tgz
e8c5d12d87829c503afba01d67772ea9f4aba5b7ae57a0c98e1917711030efbb  iframe-worker-1.0.4.tgz
endef
export SCRIPTS_SHA256

docs: $(DOCS)/.installed ## the pages as a site; fails at a dead link or a page that mkdocs.yml does not list
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "$(CURDIR)/$(DOCS)/site/index.html"

pictures: setup ## the pictures of docs/frontend.md and docs/console.md, taken by their tests
	@PICTURES=docs $(BIN)/python -m pytest -q tests/engine/pages/test_frontend_page.py tests/engine/pages/test_console_in_a_browser.py

test-all: $(DOCS)/.installed

$(DOCS)/.installed: requirements/docs.txt docs/docs.mk
	@command -v npm >/dev/null || { echo "make docs gets two scripts by npm, once: install npm, then run it again."; exit 1; }
	@echo "tools for make docs into $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --require-hashes --requirement requirements/docs.txt
	@mkdir -p $(DOCS)/theme/assets
	@cd $(DOCS) && npm pack --silent $(SCRIPTS) >/dev/null && echo "$$SCRIPTS_SHA256" | shasum --algorithm 256 --check --quiet
	@tar -xzOf $(DOCS)/mermaid-*.tgz package/dist/mermaid.min.js > $(DOCS)/theme/assets/mermaid.js
	@tar -xzOf $(DOCS)/iframe-worker-*.tgz package/shim/index.js > $(DOCS)/theme/assets/iframe-worker.js
	@rm $(DOCS)/*.tgz
	@touch $@
