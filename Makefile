# Two commands for a newcomer: `make serve` and `make test`. All that they install is in .venv; `make clean` removes it.
#
#   make serve ARGS="--port 9000"                              any flag of `minserve --help`
#   make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu   torch from another index; it stays for later runs
#   make serve PYTHON=python3.12                               another interpreter, when .venv is made

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
CHECK_ARGS ?=

BIN := $(VENV)/bin
TORCH_STAMP := $(VENV)/.torch-$(subst =,_,$(subst :,_,$(subst /,_,$(TORCH)$(TORCH_INDEX))))
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.PHONY: serve test install clean

serve: $(VENV)/.installed
	@$(BIN)/minserve $(ARGS)

test: $(VENV)/.installed-test
	@$(BIN)/python tools/check $(CHECK_ARGS)

install: $(VENV)/.installed

clean:
	rm -rf $(VENV)

# Each stamp is written last, so that an interrupted step is done again, and a finished one costs nothing.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "minserve needs Python 3.11 or newer, and there is no '$(PYTHON)' here."; \
	  echo "Install it (Debian, Ubuntu: apt-get install python3 python3-venv) or name yours: make PYTHON=/path/to/python3.12"; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "minserve needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "If a newer one is installed, name it: make PYTHON=python3.12"; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing."; \
	  echo "Install it (Debian, Ubuntu: apt-get install python3-venv) and try again."; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and alone: its index may differ, and a change of pyproject.toml does not download it again.
# An index is named to replace what is there: for pip, 2.13.0+cpu and 2.13.0 are the same release.
$(TORCH_STAMP): $(VENV)/.created
	$(PIP) $(if $(TORCH_INDEX),--force-reinstall --index-url $(TORCH_INDEX)) "$(TORCH)"
	@rm -f $(VENV)/.torch-*
	@touch $@

$(VENV)/.installed: $(TORCH_STAMP) pyproject.toml
	$(PIP) --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(TORCH_STAMP) pyproject.toml
	$(PIP) --quiet --editable '.[test]'
	@touch $(VENV)/.installed $@
