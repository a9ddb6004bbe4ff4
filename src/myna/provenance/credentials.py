"""Content credentials (C2PA) of audio files: signed with a key of this machine, read and verified offline; and the
optional packages of the extra `mark`, which are found without importing them."""

import importlib.util
import io
import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from myna.audio.files import Samples, encode_audio_file
from myna.core.errors import OutputError
from myna.core.io import atomic_write, private_file, sniff_suffix, user_folder
from myna.provenance.speech_log import SpeechOrigin, log_speech

MIME_TYPES = {".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".m4a": "audio/mp4"}
"""MIME types of the formats with a place for credentials, by suffix."""
PERTH_CHECKPOINT = "perth/perth_net/pretrained/implicit/perth_net_250000.pth.tar"
INSTALL_HINT = 'pip install "myna[mark]"'
UNMARKED_HINT = f"{INSTALL_HINT}, or speak without a watermark: --no-watermark (watermark=False)"
KEY_FILE = "signing-key.pem"
KEY_DAYS = 3650
UNUSED_KEY_USAGES = (
    "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"
)  # fmt: skip
ASSERTION = "myna.speech"
SYNTHETIC = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
"""IPTC term for media made by a trained model."""
CredentialState = Literal["own", "valid", "invalid"]


@dataclass(frozen=True, slots=True)
class Credentials:
    """Statements of a file's credentials, and whether they are valid."""

    state: CredentialState
    """`own`: signed by this installation; `valid`: signed by another key, which is not certified; `invalid`: the file
    was changed since, or the signature is broken."""
    signer: str
    generator: str
    speech: dict[str, Any] = field(default_factory=dict)
    """Model, adapter hash, voice, consent and watermark of a file written by Myna; empty for other files."""
    source_types: tuple[str, ...] = ()
    """IPTC terms for how the file was made."""
    problems: tuple[str, ...] = ()
    """C2PA codes of failed validations."""

    @property
    def is_synthetic(self) -> bool:
        """Whether valid credentials say that a model made the file."""
        return self.state != "invalid" and SYNTHETIC in self.source_types


def check_installed() -> None:
    """Refuse to mark speech if a package for it is missing."""
    perth_checkpoint()
    if not credentials_installed():
        raise OutputError("what is spoken is signed, and c2pa-python is not installed", hint=UNMARKED_HINT)


def credentials_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("c2pa", "cryptography"))


def perth_checkpoint(hint: str = UNMARKED_HINT) -> Path:
    """Return the file of the watermark's weights in the package resemble-perth, which is not imported. Missing weights
    are an error with the `hint`."""
    try:
        file = Path(str(metadata.distribution("resemble-perth").locate_file(PERTH_CHECKPOINT)))
    except metadata.PackageNotFoundError:
        raise OutputError("the watermark needs resemble-perth, which is not installed", hint=hint) from None
    if not file.is_file():
        raise OutputError(f"resemble-perth is installed without its weights: {file} is missing", hint=hint)
    return file


def sign_audio(content: bytes, suffix: str, origin: SpeechOrigin) -> bytes | None:
    """Return the bytes of a file with credentials in them; None for a format without a place for them, or without
    c2pa-python."""
    mime = MIME_TYPES.get(suffix.lower())
    if mime is None or not credentials_installed():
        return None
    import c2pa  # type: ignore[import-untyped]

    known = {key: value for key, value in asdict(origin).items() if value and key not in ("text", "seed")}
    created = {"action": "c2pa.created", "digitalSourceType": SYNTHETIC}
    manifest = {
        "claim_generator_info": [{"name": "Myna", "version": metadata.version("myna")}],
        "title": f"{origin.id}{suffix}",
        "assertions": [{"label": "c2pa.actions", "data": {"actions": [created]}}, {"label": ASSERTION, "data": known}],
    }
    certificates, *private_key = _signing_key().partition(b"-----BEGIN PRIVATE")
    signed = io.BytesIO()
    with (
        c2pa.Signer.from_info(c2pa.C2paSignerInfo("es256", certificates, b"".join(private_key), None)) as signer,
        c2pa.Builder(manifest) as builder,
    ):
        builder.sign(signer, mime, io.BytesIO(content), signed)
    return signed.getvalue()


def write_speech(path: Path, samples: Samples, sample_rate: int, origin: SpeechOrigin) -> bool:
    """Write an audio file with its credentials, complete or not at all, and log it. Return whether it could be
    signed."""
    plain = encode_audio_file(path, samples, sample_rate)
    signed = sign_audio(plain, path.suffix, origin)
    content = plain if signed is None else signed
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    seconds = round(len(samples) / sample_rate, 3)
    log_speech("saved", origin, content, file=path, seconds=seconds, signed=signed is not None)
    return signed is not None


def read_credentials(path: Path) -> Credentials | None:
    """Return the credentials in an audio file; None if there are none. Nothing is fetched from a network."""
    content = path.read_bytes()
    mime = MIME_TYPES.get(sniff_suffix(content))
    if mime is None:
        return None
    if not credentials_installed():
        raise OutputError("content credentials are read by c2pa-python, which is not installed", hint=INSTALL_HINT)
    import c2pa

    own = _own_certificates()
    settings: dict[str, Any] = {"verify": {"remote_manifest_fetch": False, "ocsp_fetch": False, "verify_trust": True}}
    if own:
        settings["trust"] = {"trust_anchors": own}
    try:
        with c2pa.Context.from_dict(settings) as context:
            reader = c2pa.Reader.try_create(mime, io.BytesIO(content), context=context)
            if reader is None:
                return None
            with reader:
                return _credentials(json.loads(reader.json()), own)
    except c2pa.C2paError as error:
        # Not written by C2PA: a file cut short, or a forgery.
        return Credentials("invalid", "", "", problems=(str(error),))


def _credentials(store: dict[str, Any], own: str) -> Credentials:
    manifest = store.get("manifests", {}).get(store.get("active_manifest"), {})
    signature, generators = manifest.get("signature_info") or {}, manifest.get("claim_generator_info") or [{}]
    speech = [one["data"] for one in manifest.get("assertions", ()) if one["label"] == ASSERTION]
    lists = [one["data"] for one in manifest.get("assertions", ()) if one["label"].startswith("c2pa.actions")]
    actions = [action for data in lists for action in data.get("actions", ())]
    codes = tuple(status["code"] for status in store.get("validation_status", ()))
    state: CredentialState = "invalid"
    if store.get("validation_state") in ("Trusted", "Valid"):
        state = "own" if own and signature.get("cert_serial_number") == _serial_number(own) else "valid"
    return Credentials(
        state,
        signature.get("common_name", ""),
        f"{generators[0].get('name', '')} {generators[0].get('version', '')}".strip(),
        speech[0] if speech else {},
        tuple(kind for action in actions if (kind := action.get("digitalSourceType"))),
        tuple(code for code in codes if code != "signingCredential.untrusted"),
    )


def _serial_number(certificates: str) -> str:
    from cryptography import x509

    return str(x509.load_pem_x509_certificate(certificates.encode()).serial_number)


def _own_certificates() -> str:
    file = user_folder("config") / KEY_FILE
    return file.read_text(encoding="ascii").partition("-----BEGIN PRIVATE")[0] if file.is_file() else ""


def _signing_key() -> bytes:
    """Return certificates and private key of this installation in PEM; they are made on first use."""
    file = user_folder("config") / KEY_FILE
    return file.read_bytes() if file.is_file() else private_file(file, _make_key())


def _make_key() -> bytes:
    """Make a key with a certificate from an issuer whose own key is thrown away: C2PA refuses self-signed ones."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    issuer_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    fingerprint = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:8]
    now = datetime.now(UTC)

    def certificate(name: str, public: Any, *, is_issuer: bool) -> Any:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject(name))
            .issuer_name(subject(f"Myna issuer {fingerprint}"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=KEY_DAYS))
            .add_extension(x509.BasicConstraints(ca=is_issuer, path_length=0 if is_issuer else None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not is_issuer,
                    key_cert_sign=is_issuer,
                    crl_sign=is_issuer,
                    **dict.fromkeys(UNUSED_KEY_USAGES, False),
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        if not is_issuer:
            usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
            builder = builder.add_extension(usage, critical=False)
        return builder.sign(issuer_key, hashes.SHA256())

    def subject(name: str) -> x509.Name:
        organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Myna")
        return x509.Name([organization, x509.NameAttribute(NameOID.COMMON_NAME, name)])

    own = certificate(f"Myna installation {fingerprint}", key.public_key(), is_issuer=False)
    issuer = certificate(f"Myna issuer {fingerprint}", issuer_key.public_key(), is_issuer=True)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return bytes(own.public_bytes(Encoding.PEM) + issuer.public_bytes(Encoding.PEM) + private)
