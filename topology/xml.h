/* SPDX-License-Identifier: Apache-2.0
 *
 * A hostile XML text, element by element, with lines. */
#ifndef LC_TOPO_XML_H
#define LC_TOPO_XML_H

#include "topology/topo_internal.h"

struct lc_xml;

/* Called for each element in the order of the text; anything but 0 ends the walk. */
typedef int lc_xml_element(void *arg, struct lc_xml *xml, int line, int depth, const char *tag);
typedef int lc_xml_attribute(void *arg, int line, const char *name, const char *value);

/* 0, what a callback returned, or -EINVAL with the line of `topo` written where the text is no XML. A document type
 * is refused unless `doctype`; nothing outside the text is ever opened and no entity declared in it is expanded. */
int lc_xml_walk(struct lc_topo *topo, const char *text, size_t size, bool doctype,
                lc_xml_element *element, void *arg);

/* The attributes of the element that the walk is at. */
int lc_xml_attributes(struct lc_xml *xml, lc_xml_attribute *attribute, void *arg);

#endif
