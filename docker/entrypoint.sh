#!/bin/sh
# NGC's own entry point makes a newer CUDA run on an older driver. Other images need no entry point.
ngc=/opt/nvidia/nvidia_entrypoint.sh
if [ -x "$ngc" ]; then exec "$ngc" "$@"; fi
exec "$@"
