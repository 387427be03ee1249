"""Django settings. What an operator may change comes from the environment (see ``sluice.conf``)."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from inference.errors import ConfigError
from sluice.conf import ServerConfig, split_list

BASE_DIR = Path(__file__).resolve().parent.parent.parent

try:
    SLUICE = ServerConfig.from_env()
except ConfigError as exc:
    raise ImproperlyConfigured(str(exc)) from exc

#: Files that belong to this checkout and to no version: database, development key.
VAR_DIR = Path(SLUICE.var_dir).expanduser() if SLUICE.var_dir else BASE_DIR / "var"

DEBUG = SLUICE.debug
ALLOWED_HOSTS = SLUICE.hosts()
CSRF_TRUSTED_ORIGINS = split_list(SLUICE.csrf_trusted_origins)


def _made_var_dir() -> Path:
    """``VAR_DIR``; made, where it is missing, for nobody else to read: the database in it holds chats."""
    try:
        VAR_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ImproperlyConfigured(f"SLUICE_VAR_DIR: {VAR_DIR} cannot be made ({exc.strerror})") from None
    return VAR_DIR


def _secret_key() -> str:
    """SECRET_KEY of the environment, or outside production a random one kept in ``VAR_DIR``."""
    key = os.environ.get("SECRET_KEY", "")
    if key:
        if SLUICE.production and (len(key) < 50 or len(set(key)) < 5 or key.startswith("django-insecure-")):
            raise ImproperlyConfigured("SECRET_KEY is too weak for production: use at least 50 random characters")
        return key
    if SLUICE.production:
        raise ImproperlyConfigured(
            "SECRET_KEY is not set. With SLUICE_PRODUCTION it must be, and be the same on every server: "
            "python -c 'import secrets; print(secrets.token_urlsafe(50))'"
        )
    path = _made_var_dir() / "secret_key"
    try:
        # O_EXCL: of several processes that start at once, one writes and the others read.
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(50))
    except FileExistsError:
        pass
    for _ in range(100):
        if key := path.read_text().strip():
            return key
    raise ImproperlyConfigured(f"{path} is empty; delete it and start again")


SECRET_KEY = _secret_key()

INSTALLED_APPS = [
    "daphne",
    "sluice",
    "channels",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_prometheus",
    "apps.accounts",
    "apps.api",
    "apps.inflight",
    "apps.chat",
]

MIDDLEWARE = [
    "django_prometheus.middleware.PrometheusBeforeMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "sluice.csp.content_security_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "sluice.metrics.pages.PagesMiddleware",
]

ROOT_URLCONF = "sluice.urls"
ASGI_APPLICATION = "sluice.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]


def _database() -> dict[str, object]:
    url = os.environ.get("DATABASE_URL", "")
    try:
        database = dict(dj_database_url.parse(url or f"sqlite:///{VAR_DIR / 'db.sqlite3'}"))
    except Exception as exc:  # noqa: BLE001 - the parser raises whatever its parts raise
        raise ImproperlyConfigured(
            f"DATABASE_URL is malformed; for instance postgres://user:password@host:5432/name ({type(exc).__name__})"
        ) from None
    if str(database["ENGINE"]).endswith("sqlite3"):
        _made_var_dir()
        database["OPTIONS"] = {
            # Readers never wait for the writer; a writer waits instead of failing.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
        }
    return database


DATABASES = {"default": _database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTHENTICATION_BACKENDS = ["apps.accounts.backends.ThrottledBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True

STATIC_URL = "/static/"
# The JavaScript client is a product of its own; the chat page uses the same file.
STATICFILES_DIRS = [("sluice/client", BASE_DIR / "clients" / "js")]

SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SLUICE.production
# What `manage.py check --deploy` need not ask for, each with its reason.
SILENCED_SYSTEM_CHECKS = []
if SLUICE.behind_proxy:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
if SLUICE.production:
    SECURE_HSTS_SECONDS = SLUICE.hsts_seconds
    SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = SLUICE.hsts_subdomains
    if not SLUICE.hsts_subdomains:
        # Whether the other hosts of the domain speak TLS is not for this program to decide.
        SILENCED_SYSTEM_CHECKS += ["security.W005", "security.W021"]
    # Pages alone: health, metrics and the API are no Django views, and probes speak plain HTTP.
    SECURE_SSL_REDIRECT = SLUICE.behind_proxy
    if not SLUICE.behind_proxy:
        # No proxy can tell what came over TLS, so that a redirect would lead in a circle.
        SILENCED_SYSTEM_CHECKS += ["security.W008"]

# /metrics is served by this process itself, not by a thread on another port.
PROMETHEUS_METRICS_EXPORT_PORT = None
PROMETHEUS_EXPORT_MIGRATIONS = False

#: Before each line of the log: whoever runs this is a server, unless it is one of the short commands.
WHO = "server" if Path(sys.argv[0]).name != "manage.py" or sys.argv[1:2] == ["serve"] else ""
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "request_id": {"()": "sluice.logs.RequestIdFilter"},
        "refused": {"()": "sluice.logs.RefusedFilter"},
    },
    "formatters": {
        "text": {"()": "inference.logs.LineFormatter", "who": WHO},
        "json": {"()": "inference.logs.JsonFormatter"},
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": SLUICE.log_format,
            "filters": ["request_id", "refused"],
        },
    },
    "root": {"handlers": ["stderr"], "level": SLUICE.log_level.upper()},
    "loggers": {
        # Their own handlers would print each line twice, and mail is not sent from here.
        "django": {"handlers": [], "propagate": True, "level": SLUICE.log_level.upper()},
        "django.server": {"handlers": [], "propagate": True},
        # A 404 is the client's business; junk traffic must not fill the log.
        "django.request": {"level": "ERROR"},
        # Below this they tell of templates and statements with all that is in them: new keys, what people write.
        "django.template": {"level": "INFO"},
        "django.db.backends": {"level": "INFO"},
        "daphne": {"level": "WARNING"},
        "httpx": {"level": "WARNING"},
    },
}
