#!/usr/bin/env bash
# What a new user does, as a script: a clean clone of HEAD in an empty folder, the commands of its README, a request,
# Ctrl-C, and a look at what is left. One line for each check; the first that fails ends it with status 1.
#
# Of this machine only pip's download cache is used: home, caches and temporary folder are new and empty.
set -euo pipefail

source_dir=$(cd "$(dirname "$0")/.." && pwd)
port=${PORT:-18080}
url=http://127.0.0.1:$port
python=${PYTHON:-python3.11}
install_s=900 # first start: virtual environment, dependencies, conversion of the model
again_s=20    # every later start
end_s=12      # from Ctrl-C to the end

work=$(mktemp -d)
clone=$work/kvrelay
began_s=$SECONDS
session=

passed() { printf 'ok    [%4d s] %s\n' $((SECONDS - began_s)) "$1"; }
failed() {
    printf 'FAIL  [%4d s] %s\n' $((SECONDS - began_s)) "$1" >&2
    for file in "$work"/serve-*.err "$work"/serve-*.out; do
        [ -s "$file" ] && printf -- '---- %s\n' "${file##*/}" >&2 && tail -n 40 "$file" >&2
    done
    exit 1
}

# Everything that was started here has this home in its environment, whatever became of its parents.
ours() { grep -lzsx -- "HOME=$work/home" /proc/[0-9]*/environ | cut -d/ -f3 || true; }
names_of() { for pid in $(ours); do tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-100; done; }
now_us() { echo "${EPOCHREALTIME/[.,]/}"; }
is_running() { kill -0 "$session" 2>/dev/null; }
is_listening() { (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; }
shared_memory() { ls -A /dev/shm | sort; }
temporary() { find /tmp -maxdepth 1 \( -name 'kvrelay*' -o -name 'ray*' \) | sort; }

clear_up() {
    local pid
    for pid in $(ours); do kill -KILL "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap clear_up EXIT
trap 'exit 1' INT TERM HUP

# Becomes the given command as a terminal would start it: new session, Ctrl-C not ignored, a user's plain environment.
become() {
    local -a network=()
    mapfile -t network < <(env | grep -E '^(https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY|[A-Z_]*CA_BUNDLE|SSL_CERT_FILE|PIP_[A-Z_]*)=' || true)
    exec env -i "${network[@]}" PATH="$PATH" LANG="${LANG:-C.UTF-8}" HOME="$work/home" TMPDIR="$work/tmp" \
        PIP_CACHE_DIR="$pip_cache" "$python" -c '
import os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])' "$@"
}

serve() { # name, longest wait in seconds
    local out=$work/serve-$1.out err=$work/serve-$1.err start_s=$SECONDS started_us=$(now_us) took_us
    touch "$out"
    (cd "$clone" && become make serve PORT="$port") >"$out" 2>"$err" &
    session=$!
    until grep -q "^kvrelay is ready on $url" "$out"; do
        is_running || failed "make serve ended before it was ready ($1)"
        [ $((SECONDS - start_s)) -le "$2" ] || failed "make serve is not ready after $2 s ($1)"
        sleep 0.2
    done
    took_us=$(($(now_us) - started_us))
    [ "$took_us" -lt $(($2 * 1000000)) ] || failed "make serve took $((took_us / 1000)) ms, more than $2 s ($1)"
    passed "make serve PORT=$port is ready in $((took_us / 1000)) ms ($1)"
}

press_ctrl_c() {
    local start_s=$SECONDS
    kill -INT -- "-$session" # its session's first process leads the group that a terminal would signal
    while is_running || [ -n "$(ours)" ]; do
        [ $((SECONDS - start_s)) -le "$end_s" ] || failed "$end_s s after Ctrl-C there are still: $(names_of)"
        sleep 0.2
    done
    wait "$session" 2>/dev/null || true # make itself reports the interrupt
    passed "Ctrl-C ends it in $((SECONDS - start_s)) s, and no process is left"
}

nothing_left() {
    ! is_listening || failed "port $port is still taken"
    passed "port $port is free"
    [ "$(shared_memory)" = "$shm_before" ] || failed "left in /dev/shm: $(comm -13 <(echo "$shm_before") <(shared_memory))"
    passed "nothing is left in /dev/shm"
    [ -z "$(ls -A "$work/tmp")" ] || failed "left in the temporary folder: $(ls -A "$work/tmp")"
    [ "$(temporary)" = "$tmp_before" ] || failed "left in /tmp: $(comm -13 <(echo "$tmp_before") <(temporary))"
    passed "no temporary file is left"
    [ ! -e "$work/home/.ray" ] || failed "Ray left its token in the home"
    [ -z "$(ls -A "$work/home/.local/state/kvrelay/run" 2>/dev/null)" ] || failed "left in the state folder: run/"
    passed "home has nothing but logs and the converted model"
}

for tool in git make curl "$python"; do command -v "$tool" >/dev/null || failed "this script needs $tool"; done
pip_cache=$("$python" -m pip cache dir)
mkdir "$work/home" "$work/tmp"
! is_listening || failed "port $port is taken; PORT=... chooses another"
shm_before=$(shared_memory)
tmp_before=$(temporary)

git clone --quiet "$source_dir" "$clone"
grep -q 'make serve' "$clone/README.md" || failed "README.md does not say 'make serve'"
passed "clean clone of $(git -C "$clone" rev-parse --short HEAD)"

serve first "$install_s"

answer=$(timeout 60 bash -c "$(sed -n '/^curl /p' "$work/serve-first.out")" 2>"$work/serve-curl.err") || failed "the curl line that was printed failed"
grep -q '"delta"' <<<"$answer" || failed "the curl line brought no tokens: $answer"
[ "$(tail -n 1 <<<"$answer")" = "data: [DONE]" ] || failed "the stream did not end with [DONE]: $(tail -n 3 <<<"$answer")"
passed "the curl line that was printed streams an answer"

(cd "$clone" && timeout 120 .venv/bin/python - "$url") <<'PYTHON' 2>"$work/serve-openai.err" || failed "the openai client"
import sys

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60)
model = client.models.list().data[0].id
ask = {"model": model, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 16, "temperature": 0}
whole = client.chat.completions.create(**ask)
chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert whole.choices[0].message.content == text != "", (whole, text)
assert chunks[-1].usage == whole.usage, (chunks[-1], whole.usage)
PYTHON
passed "the openai client gets the same answer streamed and not"

press_ctrl_c
nothing_left

serve second "$again_s"
curl -fsS -m 10 "$url/ready" >/dev/null || failed "/ready"
map=$("$clone/.venv/bin/kvrelay" status --url "$url") || failed "kvrelay status"
grep -q 'prefill-0' <<<"$map" && grep -q 'decode-0' <<<"$map" || failed "kvrelay status does not show the workers: $map"
passed "kvrelay status shows the workers"
press_ctrl_c
nothing_left
passed "a new user can use it"
