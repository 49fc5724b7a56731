"""`/docs` and `/redoc` without anything from outside, for machines that reach no other."""

from importlib.resources import files

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

PARTS = "/docs/parts"


def offline_docs(title: str, openapi_url: str) -> list[Route | Mount]:
    """Routes to both pages and to their parts, which the package fastapi-offline brings along."""

    async def docs(request: Request) -> HTMLResponse:
        root = _root(request)
        return get_swagger_ui_html(
            openapi_url=root + openapi_url,
            title=title,
            swagger_js_url=f"{root}{PARTS}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{PARTS}/swagger-ui.css",
            swagger_favicon_url=f"{root}{PARTS}/favicon.png",
        )

    async def redoc(request: Request) -> HTMLResponse:
        root = _root(request)
        return get_redoc_html(
            openapi_url=root + openapi_url,
            title=title,
            redoc_js_url=f"{root}{PARTS}/redoc.standalone.js",
            redoc_favicon_url=f"{root}{PARTS}/favicon.png",
            with_google_fonts=False,
        )

    parts = StaticFiles(directory=str(files("fastapi_offline") / "static"))
    return [Mount(PARTS, parts), Route("/docs", docs), Route("/redoc", redoc)]


def _root(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root.rstrip("/")
