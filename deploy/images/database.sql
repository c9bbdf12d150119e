-- What postgres's image does once, while the database is new and nobody but this can connect. The program's role owns
-- its database and nothing else; the superuser has no password, and so is reached from inside of the container alone.
\set password `cat /run/secrets/postgres-password`
CREATE ROLE swarmproof LOGIN PASSWORD :'password';
CREATE DATABASE swarmproof OWNER swarmproof;
ALTER ROLE postgres PASSWORD NULL;
