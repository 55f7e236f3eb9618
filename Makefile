# Everything runs in .venv, made from a bare python3 with venv. CPU wheels are pinned by constraints-cpu.txt; on a GPU
# machine say CONSTRAINTS= to let pip choose torch and triton for its driver.
PYTHON ?= python3
CONSTRAINTS ?= -c constraints-cpu.txt
EXTRAS ?= dev,bench,amd,simulator,hopper
BIN := .venv/bin
STAMP := .venv/.installed-$(EXTRAS)

.PHONY: demo test lint test-slow test-amd test-gpu measure-cpu verify-gpu sanitize counters support-table bench-tables \
	clean

demo: $(STAMP)
	$(BIN)/undertow verify

# Three runs: compiled and interpreted Triton cannot share a process, nor FlyDSL and CUTLASS's DSL.
HOPPER_BUILD := tests/test_hopper_build.py
test: $(STAMP) lint
	$(BIN)/python -m pytest tests/simulator -m "not slow and not gpu" -n 2 --dist loadfile
	$(BIN)/python -m pytest $(HOPPER_BUILD) -m "not slow and not gpu" -n 2
	$(BIN)/python -m pytest tests --ignore $(HOPPER_BUILD) -m "not slow and not gpu" -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check src tests tools
	$(BIN)/lint-imports
	$(BIN)/python tools/check_kernels.py src/undertow/kernels/*/*_device.py

test-slow: $(STAMP)
	$(BIN)/python -m pytest tests/simulator -m "slow and not gpu"
	$(BIN)/python -m pytest $(HOPPER_BUILD) -m "slow and not gpu"
	$(BIN)/python -m pytest tests --ignore $(HOPPER_BUILD) -m "slow and not gpu"

test-amd: $(STAMP)
	$(BIN)/python -m pytest tests/simulator
	$(BIN)/python -m pytest tests/flydsl tests/test_probe.py

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

measure-cpu: $(STAMP)
	$(BIN)/python tools/measure_cpu.py

verify-gpu: $(STAMP)
	$(BIN)/undertow verify all --device cuda --kernel triton --out verify_gpu.json

# Tiny calls of our kernels under NVIDIA's checkers of memory, barriers and uninitialised reads, then of races, where
# two reports on the Hopper kernels are known (docs/hopper.md).
sanitize: $(STAMP)
	for tool in memcheck synccheck initcheck; do PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python tools/sanitize.py || exit 1; done
	compute-sanitizer --tool racecheck $(BIN)/python tools/sanitize.py

# Where the Hopper kernels' time goes at the bench's shapes, as a table (needs ncu).
counters: $(STAMP)
	$(BIN)/python tools/counters.py

support-table: $(STAMP)
	$(BIN)/python tools/support_table.py README.md

# After a run of the whole table: cp DIR/record.json src/undertow/measured/h200.json
bench-tables: $(STAMP)
	$(BIN)/python tools/bench_tables.py --plots docs/bench.md

$(STAMP): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
