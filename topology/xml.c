/* SPDX-License-Identifier: Apache-2.0 */
#include "topology/xml.h"

#include <errno.h>
#include <libxml/xmlreader.h>
#include <limits.h>
#include <string.h>

struct lc_xml {
    struct lc_topo *topo;
    xmlTextReaderPtr reader;
    bool broken; /* the one line has been written */
};

/* libxml2 tells of the first error and goes on; only the first is worth a line. The type of the second argument has
 * become const in newer releases. */
static void on_error(void *arg, xmlErrorPtr error)
{
    struct lc_xml *xml = arg;
    char text[200];

    if (!error || xml->broken || error->level < XML_ERR_ERROR)
        return;
    (void)snprintf(text, sizeof(text), "%s", error->message ? error->message : "no XML");
    text[strcspn(text, "\n")] = '\0';
    (void)lc_topo_fail(xml->topo, EINVAL, error->line > 0 ? error->line : 1, "no valid XML: %s",
                       text);
    xml->broken = true;
}

/* The parser itself has read further already. */
static int line_of(struct lc_xml *xml)
{
    xmlNodePtr node = xmlTextReaderCurrentNode(xml->reader);
    long line = node ? xmlGetLineNo(node) : 0;

    return line > 0 && line < INT_MAX ? (int)line : xmlTextReaderGetParserLineNumber(xml->reader);
}

static int take(struct lc_xml *xml, bool doctype, lc_xml_element *element, void *arg)
{
    int type = xmlTextReaderNodeType(xml->reader);
    int line = line_of(xml);
    const xmlChar *name = xmlTextReaderConstName(xml->reader);

    if (type == XML_READER_TYPE_DOCUMENT_TYPE && !doctype)
        return lc_topo_fail(xml->topo, EINVAL, 0,
                            "a document type declaration, which such a file has not");
    if (type != XML_READER_TYPE_ELEMENT)
        return 0;
    return element(arg, xml, line, xmlTextReaderDepth(xml->reader), name ? (const char *)name : "");
}

int lc_xml_walk(struct lc_topo *topo, const char *text, size_t size, bool doctype,
                lc_xml_element *element, void *arg)
{
    struct lc_xml xml = { .topo = topo };
    int err = 0;
    int more;

    if (size > LC_TOPO_MAX_FILE)
        return lc_topo_fail(topo, EFBIG, 0, "larger than %zu MiB", LC_TOPO_MAX_FILE >> 20);
    xml.reader = xmlReaderForMemory(text, (int)size, NULL, NULL,
                                    XML_PARSE_NONET | XML_PARSE_NOWARNING | XML_PARSE_BIG_LINES);
    if (!xml.reader)
        return lc_topo_fail(topo, ENOMEM, 0, "no memory");
    xmlTextReaderSetStructuredErrorHandler(xml.reader, (xmlStructuredErrorFunc)(void *)on_error,
                                           &xml);
    while (!err && !xml.broken && (more = xmlTextReaderRead(xml.reader)) != 0) {
        if (more < 0 && !xml.broken) {
            (void)lc_topo_fail(topo, EINVAL, 1, "no valid XML");
            xml.broken = true;
        }
        if (!xml.broken)
            err = take(&xml, doctype, element, arg);
    }
    xmlFreeTextReader(xml.reader);
    return xml.broken ? -EINVAL : err;
}

int lc_xml_attributes(struct lc_xml *xml, lc_xml_attribute *attribute, void *arg)
{
    int line = line_of(xml);
    int err = 0;

    while (!err && !xml->broken && xmlTextReaderMoveToNextAttribute(xml->reader) == 1) {
        const xmlChar *name = xmlTextReaderConstName(xml->reader);
        const xmlChar *value = xmlTextReaderConstValue(xml->reader);

        err = attribute(arg, line, name ? (const char *)name : "",
                        value ? (const char *)value : "");
    }
    (void)xmlTextReaderMoveToElement(xml->reader);
    return err;
}
