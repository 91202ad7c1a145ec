# Two commands: `make demo` runs the main job on the embedded default, `make test` the tests.
# Both make .venv first; a broken first attempt is finished by the next one.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
OUT ?= results/demo-$(shell date -u +%Y%m%dT%H%M%SZ)

.PHONY: demo test lint install clean

demo: $(STAMP)
	@$(VENV)/bin/evalgate run --out $(OUT); code=$$?; \
	if [ -f $(OUT)/report.html ]; then echo "HTML report: $(OUT)/report.html"; fi; \
	case $$code in 0|3) exit 0;; *) exit $$code;; esac

test: $(STAMP) lint
	$(PY) -m pytest

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

install: $(STAMP)

# The stamp is written last, so an interrupted installation starts again where pip left it.
$(STAMP): pyproject.toml $(wildcard setup.py) tools/install.sh kernels_patch/build.py $(wildcard kernels_patch/*.cpp kernels_patch/*.h)
	PYTHON=$(PYTHON) VENV=$(VENV) sh tools/install.sh
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
