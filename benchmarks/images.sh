#!/bin/sh
# The pictures of docs/images: those of predictions. With MEASURED also those of a run of its own, the
# timelines: on a machine that does nothing else.
# usage: benchmarks/images.sh BIN [MEASURED]      BIN has the commands python and weft; from the root of the repository
set -eu
bin=$1 measured=${2:-} images=docs/images

predict() { # of an all-gather + matmul
  "$bin/weft" predict all-gather-matmul "$@" >/dev/null
}
predict --machine ascend-910b1 -n 8 --shape 8192x4096x4096 --dtype float16 --timeline $images/predicted-orders.png
predict --machine h100-nvlink-8 -n 8 --shape 8192x8192x7168 --dtype bfloat16 --sweep link=25:800 --plot $images/predicted-link.png
predict --machine h100-nvlink-8 --shape 65536x8192x7168 --dtype bfloat16 --sweep ranks=2:512:4 --plot $images/predicted-ranks.png

[ -z "$measured" ] && exit
"$bin/weft" bench all-gather-matmul --dtype float32 --link-gbps auto --timeline $images/timeline.png
"$bin/weft" bench all-gather-matmul --shape 512x2560x1280 --algorithm push --dtype bfloat16 --bias --return-gathered --ablate \
  --iterations 15 --link-gbps auto --timeline $images/steps.png
