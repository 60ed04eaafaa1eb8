"""`InputRules` under the name by which scripts import it; its home is `data_prep.files`."""

from data_prep.files.documents import InputRules as InputRules
