#!/usr/bin/env bash
# A read-only role for Grafana, created together with the database. Running this script again sets the password of the role again.
# The image's entry point runs it as the user postgres, which cannot read the host's secrets, so compose.yml copies them
# first.
set -euo pipefail
# On a separate line: if a command fails inside an argument, the script continues, and the role would have no password.
GRAFANA_PASSWORD=$(cat -- "${GRAFANA_PASSWORD_FILE:-/etc/farm-database/grafana_database_password}")
: "${GRAFANA_PASSWORD:?is empty: look at the file that it is read from}"
export GRAFANA_PASSWORD  # passed in the environment, because process listings show arguments
psql --no-psqlrc --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" --set ON_ERROR_STOP=1 <<'END'
\getenv password GRAFANA_PASSWORD
SELECT 'CREATE ROLE grafana' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'grafana') \gexec
ALTER ROLE grafana LOGIN PASSWORD :'password' CONNECTION LIMIT 10;
ALTER ROLE grafana SET default_transaction_read_only = on;
ALTER ROLE grafana SET statement_timeout = '30s';
GRANT pg_read_all_data TO grafana;
END
