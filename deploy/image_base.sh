#!/usr/bin/env bash
# Makes a base image out of Debian's packages, for machines that reach a mirror but no registry.
#   deploy/image_base.sh localhost/qlinear-base:bookworm
# Needs root, debootstrap and buildah.
set -euo pipefail
name=$1
export BUILDAH_ISOLATION=chroot
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase --include=ca-certificates "${SUITE:-bookworm}" "$folder/root"
rm -f "$folder"/root/var/cache/apt/archives/*.deb
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/root" /
buildah config --cmd /bin/bash "$container"
buildah commit --quiet --rm "$container" "$name"
