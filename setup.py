"""Packaging: the top-level folders install as ``gptile`` and its subpackages."""

from pathlib import Path

from setuptools import setup

ROOMS = ("model", "kernels", "weights", "bench", "train")

BENCH = [
    "transformers>=5.0",
    "matplotlib>=3.9",
    "jinja2>=3.1",
    "scipy>=1.13",
    "nvidia-ml-py>=12",
]

setup(
    name="gptile",
    version="0.1.0",
    description="GPT-2 from scratch, equal to transformers.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10,<3.14",
    packages=["gptile", *(f"gptile.{room}" for room in ROOMS)],
    package_dir={"gptile": "gptile", **{f"gptile.{room}": room for room in ROOMS}},
    package_data={
        "gptile.weights": ["demo/*"],
        "gptile.bench": ["report.html"],
        "gptile": ["py.typed"],
    },
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; sys_platform == 'linux'",
        "safetensors>=0.5",
        "huggingface-hub>=1.0",
        "tiktoken>=0.13",
        "numpy>=1.26",
        "click>=8.1",
        "rich>=13.7",
        "psutil>=5.9",
    ],
    extras_require={
        "train": ["tokenizers>=0.22"],
        "bench": BENCH,
        "fast": ["numba>=0.63"],
        # llama-cpp-python compiles llama.cpp: some minutes, with cmake and a C++ compiler.
        "peers": [
            *BENCH,
            "ctranslate2>=4.8",
            "onnxruntime>=1.23",
            "onnx>=1.23",
            "onnxscript>=0.7",
            "openvino>=2026.4",
            "nncf>=3.4",
            "llama-cpp-python>=0.3.36",
            "gguf>=0.19",
        ],
        "test": [
            *BENCH,
            "numba>=0.63",
            "tokenizers>=0.22",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.12",
            "mypy>=1.15",
            "types-psutil>=6",
        ],
    },
    entry_points={"console_scripts": ["gptile = gptile.cli:main"]},
    zip_safe=False,
)
