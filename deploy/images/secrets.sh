#!/bin/sh
# Make the secrets of compose.yaml of a run's folder, which has run.key: `sudo sh deploy/images/secrets.sh FOLDER`.
# Compose hands them out as they are on this host, so that each belongs to the user of the container that reads it.
set -eu
cd "$1"
umask 077
mkdir secrets
random() { head -c 32 /dev/urandom | od -A n -t x1 | tr -d ' \n'; }
# keep NAME UID: what comes on standard input, readable by that user alone.
keep() { cat > "secrets/$1" && chown "$2:$2" "secrets/$1" && chmod 0400 "secrets/$1"; }
password=$(random) access=$(random | head -c 20) secret=$(random)
keep run.key 10001 < run.key
printf '*:*:*:swarmproof:%s\n' "$password" | keep pgpass 10001
printf '%s\n' "$password" | keep postgres-password 999
printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$access" "$secret" | keep s3-credentials 10001
printf '{"identities": [{"name": "swarmproof", "credentials": [{"accessKey": "%s", "secretKey": "%s"}],
 "actions": ["Read:swarmproof", "Write:swarmproof", "List:swarmproof"]}]}\n' "$access" "$secret" | keep s3.json 1000
