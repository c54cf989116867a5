# The demo in a container, without a GPU. A test installs from exactly the files copied here; no image was built yet.
#     docker build -t forerun-demo .
#     docker run --rm --shm-size=1g -v forerun-demo:/data forerun-demo             # resumes where it stopped
#     docker run --rm -v forerun-demo:/data forerun-demo status demo/study
# Ray wants more shared memory than Docker's 64 MB.
FROM python:3.12-slim

# For torch.compile on a CPU.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt ./
# torch alone and first, at the version of constraints.txt: from PyPI it would come with several GB of CUDA.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY proxies proxies
COPY sweeps sweeps
COPY transfer transfer
COPY scaling_fits scaling_fits
COPY launcher launcher
COPY forerun forerun
# mup asks for torchvision and never imports it.
RUN pip install --no-cache-dir -c constraints.txt . && pip uninstall -y torchvision

RUN useradd --create-home forerun && mkdir /data && chown forerun /data
USER forerun
WORKDIR /data
ENV OMP_NUM_THREADS=1
VOLUME /data
ENTRYPOINT ["forerun"]
CMD ["demo"]
