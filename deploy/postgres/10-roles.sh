#!/usr/bin/env bash
# Runs once, when the database is first made: a role for Grafana that can only read.
set -euo pipefail
psql --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" --set ON_ERROR_STOP=1 \
    --set password="$(cat /run/secrets/grafana_database_password)" <<'END'
CREATE ROLE grafana LOGIN PASSWORD :'password' CONNECTION LIMIT 10;
ALTER ROLE grafana SET default_transaction_read_only = on;
ALTER ROLE grafana SET statement_timeout = '30s';
GRANT pg_read_all_data TO grafana;
END
